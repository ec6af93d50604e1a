"""Models on disk: location of each tensor in the files, reads by rows, and atomic writes of directories."""
