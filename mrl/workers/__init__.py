"""Worker pools: processes that run users' functions and programs. Workers import this first: it imports nothing."""
