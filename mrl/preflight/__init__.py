"""What `mrl preflight` shows and `mrl train` demands before it starts a process: a look at each thing, one file for
looks that go together."""
