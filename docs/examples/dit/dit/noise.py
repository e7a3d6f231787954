# dit/noise.py
from titanlite.modules import keyed_normal, keyed_uniform


def noise_of(images, sample_keys):
    """Noise of the shape of the images [B, 1, 8, 8]."""
    return keyed_normal(sample_keys, images.shape[1:], "noise", dtype=images.dtype)


def time_of(images, sample_keys):
    """Times [B] in [0, 1)."""
    return keyed_uniform(sample_keys, what="time", dtype=images.dtype)
