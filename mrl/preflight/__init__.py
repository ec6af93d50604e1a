"""Checks that `mrl preflight` shows and `mrl train` requires before it starts a process; one file for related
checks."""
