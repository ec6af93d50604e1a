"""Weight sync from the trainer to the engines: the sync itself, its transports, and its verification."""
