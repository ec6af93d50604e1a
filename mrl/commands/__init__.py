"""The `mrl` command, one file a subcommand: `add` declares its arguments, `run` returns its exit code.

Each subcommand imports what it needs when it runs.
"""
