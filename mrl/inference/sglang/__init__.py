"""SGLang as the rollout engine: how its server is started on CPU and on GPU."""
