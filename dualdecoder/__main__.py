"""``python -m dualdecoder`` is the console command."""

import sys

from dualdecoder.cli import main

sys.exit(main())
