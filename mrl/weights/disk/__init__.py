"""Models in directories: what of them lies where in which file, read by rows and written whole or not at all."""
