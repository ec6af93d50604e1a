"""The `mrl` command, a file a subcommand: `add` declares its arguments, `run` gives its exit code. Each imports what it
needs when it runs."""
