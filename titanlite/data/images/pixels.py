"""Convert pixels to tokens: channels, quantization, and planar order.

A token is a pixel value of one channel. A sequence is ordered channel -> row -> column, so an RGB
image is its whole red plane, then green, then blue (the order of the CIFAR-10 files).
"""

import numpy as np

from titanlite.errors import ConfigError


def pixels_to_tokens(
    pixels: np.ndarray, *, levels: int, channels: int, vocab_size: int
) -> np.ndarray:
    """Images [..., height, width, source channels] as tokens [..., channels, height, width].

    Both are uint8. `levels` is the number of values of a source pixel, 256 for photographs. Three
    channels become one by luma (ITU-R BT.601: 0.299 R + 0.587 G + 0.114 B, rounded); one becomes
    three by repetition. A vocabulary smaller than `levels` quantizes evenly,
    token = pixel * vocab_size // levels; a larger one leaves its upper tokens unused. Raises
    ConfigError for any other number of channels.
    """
    source_channels = pixels.shape[-1]
    # CIFAR-10 is 154 MB of bytes, so never convert a whole RGB set to a wider dtype.
    if (source_channels, channels) == (3, 1):
        luma = np.full(pixels.shape[:-1], 500, dtype=np.uint32)
        for channel, weight in enumerate((299, 587, 114)):
            luma += weight * pixels[..., channel].astype(np.uint32)
        pixels = (luma // 1000).astype(np.uint8)[..., None]
    elif (source_channels, channels) == (1, 3):
        pixels = np.repeat(pixels, 3, axis=-1)
    elif source_channels != channels:
        raise ConfigError(
            f"model.image_channels: {channels} cannot be made from images of {source_channels}; "
            "use 1 or 3"
        )
    if vocab_size < levels:
        pixels = (np.arange(levels) * vocab_size // levels).astype(np.uint8)[pixels]
    return np.ascontiguousarray(np.moveaxis(pixels, -1, -3))
