"""Tiny random diffusers pipelines, complete: denoiser, decoder, text encoders, tokenizers and scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDTH = 16  # size of the hidden states
SIDE = 8  # size of a latent
KINDS = ("sd", "dit", "sd3", "flux")


def tiny_pipeline(kind: str, path: Path, **scheduler: Any) -> Any:
    """Saves and returns a pipeline of kind sd, dit, sd3 or flux with random weights from seed 0."""
    import torch

    torch.manual_seed(0)
    made = {"sd": _stable_diffusion, "dit": _dit, "sd3": _sd3, "flux": _flux}[kind](scheduler)
    made.set_progress_bar_config(disable=True)
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    made.save_pretrained(path)
    return made


def _stable_diffusion(scheduler: dict[str, Any]) -> Any:
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        sample_size=SIDE,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=WIDTH,
    )
    return diffusers.StableDiffusionPipeline(
        vae=_vae(4),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, **scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _dit(scheduler: dict[str, Any]) -> Any:
    """Returns a DiT pipeline. As in published ones, the net predicts variances too, and class 1000 is "no class"."""
    import diffusers

    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=SIDE,
        patch_size=4,
        num_embeds_ada_norm=1000,
        norm_num_groups=1,
    )
    net.proj_out_2.weight.data.normal_(0, 0.02)
    steps = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, **scheduler)
    return diffusers.DiTPipeline(transformer=net, vae=_vae(4), scheduler=steps)


def _sd3(scheduler: dict[str, Any]) -> Any:
    import diffusers

    net = diffusers.SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WIDTH,
        out_channels=4,
        pos_embed_max_size=SIDE,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=net,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=_vae(4, shift_factor=0.06),
        text_encoder=_clip(projected=True),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(projected=True),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(2 * WIDTH),
        tokenizer_3=_t5_tokenizer(),
    )


def _flux(scheduler: dict[str, Any]) -> Any:
    import diffusers

    net = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        transformer=net,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"use_dynamic_shifting": True, **scheduler}),
        vae=_vae(4, shift_factor=0.06),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(WIDTH),
        tokenizer_2=_t5_tokenizer(),
    )


def _vae(latents: int, **settings: Any) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=latents,
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        scaling_factor=0.3,
        **settings,
    )


def _clip(*, projected: bool = False) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=2 * len(LETTERS) + 2,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=WIDTH,
        bos_token_id=2 * len(LETTERS),
        eos_token_id=2 * len(LETTERS) + 1,
        pad_token_id=2 * len(LETTERS) + 1,
    )
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return kind(config).eval()


def _clip_tokenizer() -> Any:
    import transformers

    pieces = (*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>")
    return transformers.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=8)


def _t5(width: int) -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=32, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


def _t5_tokenizer() -> Any:
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in LETTERS)]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)


def tiny_scorer(path: Path) -> tuple[Any, Any]:
    """Returns a CLIP model and its processor, which are also saved as a directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {name: _clip().config.to_dict()[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = sizes | ends | {"vocab_size": 2 * len(LETTERS) + 2, "max_position_embeddings": 8}
    vision = sizes | {"image_size": 32, "patch_size": 16}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.CLIPProcessor(image_processor=pictures, tokenizer=_clip_tokenizer())
    model.eval().save_pretrained(path)
    processor.save_pretrained(path)
    return model, processor
