"""Reinforcement learning of diffusion models, with denoising as the policy."""
