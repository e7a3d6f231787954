"""The two pictures: their sizes, and their pixels where those are known."""

import math
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread

from titanlite.data.images.picture import save_samples
from titanlite.observe.metrics import StepRecord
from titanlite.tools.gallery.pictures import save_loss_curve


def draw(
    path: Path, sampled: torch.Tensor, real: torch.Tensor, *shape: int, title: str = ""
) -> None:
    """`shape` is height, width, channels, vocabulary."""
    height, width, channels, values = shape
    model = SimpleNamespace(
        image_height=height, image_width=width, image_channels=channels, vocab_size=values
    )
    save_samples(path, sampled, real, model=model, title=title)


def make_records(count: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            loss=1 + math.exp(-step / 20),
            grad_norm=1.0,
            lr=1e-3,
            tokens_per_second=1e3,
            seconds=0.1,
            memory_bytes=1,
            validation_loss=1.1 + math.exp(-step / 20) if step % 10 == 0 else None,
        )
        for step in range(1, count + 1)
    ]


def read_picture(path: Path) -> np.ndarray:
    """[height, width, 3] uint8."""
    return np.round(imread(path)[..., :3] * 255).astype(np.uint8)


def has_color(picture: np.ndarray, color: str) -> bool:
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(picture.astype(int) - wanted).sum(-1) < 8).sum() > 50)


@pytest.mark.parametrize("count", [1, 2, 50, 500])
def test_the_loss_curve_has_its_lines(tmp_path: Path, count: int) -> None:
    path = tmp_path / "new folder" / "loss.png"
    save_loss_curve(path, make_records(count), vocab_size=17, title="a run")
    picture = read_picture(path)
    assert picture.shape == (720, 1152, 3)
    assert has_color(picture, "#0072b2")
    assert has_color(picture, "#767676")
    assert has_color(picture, "#d55e00") == (count >= 10)


def test_losses_that_are_not_finite_leave_a_picture(tmp_path: Path) -> None:
    records = make_records(40)
    records[10].loss, records[20].loss = math.nan, math.inf
    save_loss_curve(tmp_path / "loss.png", records)
    assert has_color(read_picture(tmp_path / "loss.png"), "#0072b2")
    with pytest.raises(ValueError, match="no records"):
        save_loss_curve(tmp_path / "loss.png", [])


def test_images_are_drawn_as_blocks_of_their_own_pixels(tmp_path: Path) -> None:
    sampled = torch.randint(0, 17, (5, 64), generator=torch.Generator().manual_seed(0))
    real = torch.randint(0, 17, (4, 64), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "samples.png"
    draw(path, sampled, real, 8, 8, 1, 17)
    picture = read_picture(path)
    # 3 images a row, 96 pixels each and 6 between; 28 around, 40 between the panels, 56 on top.
    assert picture.shape == (56 + 2 * 96 + 6 + 28, 28 + 300 + 40 + 300 + 28, 3)
    for left, panel in ((28, sampled), (28 + 300 + 40, real)):
        for i, tokens in enumerate(panel):
            top, side = 56 + i // 3 * 102, left + i % 3 * 102
            block = picture[top : top + 96, side : side + 96, 0]
            expected = (tokens.reshape(8, 8).numpy() * 255 // 16).repeat(12, 0).repeat(12, 1)
            assert np.array_equal(block, expected)


def test_three_channels_are_red_green_and_blue(tmp_path: Path) -> None:
    planes = torch.zeros(1, 3, 32, 32, dtype=torch.int64)
    planes[:, 0], planes[:, 1, :16] = 255, 128
    tokens = planes.reshape(1, -1)
    path = tmp_path / "samples.png"
    draw(path, tokens, tokens, 32, 32, 3, 256)
    picture = read_picture(path)
    assert picture[60, 60].tolist() == [255, 128, 0]
    assert picture[140, 60].tolist() == [255, 0, 0]


def test_a_long_title_makes_the_picture_wide_enough(tmp_path: Path) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    widths = []
    for title in ("", "a title that is a good deal longer than two small images are wide"):
        path = tmp_path / "samples.png"
        draw(path, tokens, tokens, 2, 2, 1, 2, title=title)
        picture = read_picture(path)
        widths.append(picture.shape[1])
        assert (picture[:, -20:] == 255).all()
    assert widths[1] > widths[0] + 200


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    good, short = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 63, dtype=torch.int64)
    for sampled, real in ((short, good), (good, short), (good[:0], good)):
        with pytest.raises(ValueError, match=r"not \[N >= 1, 64\]"):
            draw(tmp_path / "samples.png", sampled, real, 8, 8, 1, 17)
    assert not (tmp_path / "samples.png").exists()


def test_pictures_leave_matplotlib_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_loss_curve(tmp_path / "loss.png", make_records(5))
    assert dict(matplotlib.rcParams) == before


def test_a_long_title_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    save_loss_curve(path, make_records(3), vocab_size=17, title=20 * "long words ")
    pixels = read_picture(path)
    # The margins beside the title are empty.
    assert (pixels[:60, -4:] == 255).all()
    assert not (pixels[:60] == 255).all()
