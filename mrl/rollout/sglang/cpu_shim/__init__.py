"""Put on the PYTHONPATH of the engine process only; nothing in mrl imports it."""
