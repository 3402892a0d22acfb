"""Methods that DualDecoder is compared with, one a file, all through the same decode contract."""
