"""One experiment a file."""

import sys

# Before anything heavy is imported, and only where a module of this package is started as a command.
if sys.argv[:1] == ["-m"]:
    from experiments.harness.command import begin

    begin(sys.orig_argv, sys.argv[1:])
