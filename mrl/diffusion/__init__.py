"""Diffusion models whose denoising is a policy: sampled, rewarded, and taught what had a high reward."""
