"""Positions of images among the tokens of a prompt: the feature that each image token takes, and the three positions
(text, row, column) of every token, as Qwen2.5-VL and Qwen3-VL number them (`get_rope_index` of transformers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.core import Rollout
from mrl.families import VisionArch

UNKNOWN = -1  # digest of an image that no rank has decoded for the others


@dataclass(frozen=True)
class ImagePositions:
    """Image positions of the tokens [n] of some samples, one sample after the other.

    position_ids [3, n] int64
    feature [n] int64: index of the token's feature among those of `images`, one image's after the other's; -1: none
    images [k, 5] int64: the distinct images: row of the data, number in it, rows and columns of patches, digest
    """

    position_ids: Tensor
    feature: Tensor
    images: Tensor


def image_positions(part: Rollout, vision: VisionArch) -> ImagePositions:
    """Returns the image positions of all samples of `part`.

    Text counts up by one on all three axes; an image of h x w features at `now` has now + (0, row, column), and the
    next token continues at now + max(h, w). An image token in a response is text. Raises ValueError, which names the
    sample, if the number of a prompt's image tokens is not the number of its images' features.
    """
    samples = torch.arange(part.num_samples)
    sample = samples.repeat_interleave(part.seq_lens)
    starts = part.seq_lens.cumsum(0) - part.seq_lens
    offset = torch.arange(part.tokens.numel()) - starts[sample]
    is_image = (part.tokens == vision.image_token) & (offset < part.prompt_lens[sample])
    none = torch.empty(0, 3, dtype=torch.int64)
    shapes = none if part.images is None else part.images
    held = torch.zeros_like(part.seq_lens) if part.image_counts is None else part.image_counts
    owner = samples.repeat_interleave(held)
    size = shapes[:, :2] // vision.merge
    count = size.prod(1)
    nothing = torch.zeros_like(held)
    _check_counts(nothing.index_add(0, owner, count), nothing.index_add(0, sample, is_image.long()))
    if not is_image.any():
        return ImagePositions(offset.expand(3, -1), torch.full_like(offset, -1), none.new_empty(0, 5))

    at = is_image.nonzero()[:, 0]
    image = torch.arange(count.numel()).repeat_interleave(count)
    begin = count.cumsum(0) - count
    within = torch.arange(at.numel()) - begin[image]
    first = at[begin]
    # an image takes max(h, w) positions for its h * w tokens: later tokens move back by the difference
    back = torch.cat([count.new_zeros(1), (count - size.amax(1)).cumsum(0)])
    earlier = held.cumsum(0) - held  # images of the samples before
    begun = torch.zeros_like(offset).index_fill(0, first, 1).cumsum(0)  # images up to each token
    position_ids = (offset - (back[begun] - back[earlier[sample]])).repeat(3, 1)
    corner = first - starts[owner] - (back[:-1] - back[earlier[owner]])
    row, column = within // size[image, 1], within % size[image, 1]
    position_ids[:, at] = torch.stack([corner[image], corner[image] + row, corner[image] + column])

    rows = samples if part.rows is None else part.rows
    named = torch.cat([torch.stack([rows[owner], torch.arange(owner.numel()) - earlier[owner]], 1), shapes], 1)
    images, which = named.unique(dim=0, return_inverse=True)
    features = (images[:, 2:4] // vision.merge).prod(1)
    feature = torch.full_like(offset, -1)
    feature[at] = (features.cumsum(0) - features)[which[image]] + within
    return ImagePositions(position_ids, feature, images)


def _check_counts(wanted: Tensor, found: Tensor) -> None:
    wrong = (wanted != found).nonzero()[:, 0]
    if wrong.numel():
        i = int(wrong[0])
        raise ValueError(f"sample {i}: {int(found[i])} image tokens in the prompt, {int(wanted[i])} for its images")
