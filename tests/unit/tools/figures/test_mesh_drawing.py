"""The mesh as text: every rank where its coordinates say, and no page of it for 1,024 ranks."""

import itertools
import math
import re

import pytest

from titanlite.mesh.parallel_dims import AXES
from titanlite.mesh.parallel_dims import ParallelDims as Dims
from titanlite.tools.figures.mesh_drawing import draw_mesh


def test_one_rank() -> None:
    assert draw_mesh(Dims()) == "mesh: 1 rank, nothing is split"


def test_one_axis() -> None:
    assert draw_mesh(Dims(dp_shard=4)) == (
        "mesh: dp_shard 4 = 4 ranks\n"
        "\n"
        "dp_shard   0   1   2   3\n"
        "         +---+---+---+---+\n"
        "    rank | 0 | 1 | 2 | 3 |\n"
        "         +---+---+---+---+"
    )


def test_three_axes() -> None:
    assert draw_mesh(Dims(dp_replicate=2, dp_shard=2, tp=2)) == (
        "mesh: dp_replicate 2 x dp_shard 2 x tp 2 = 8 ranks\n"
        "\n"
        "                        tp   0   1\n"
        "                           +---+---+\n"
        "dp_replicate 0  dp_shard 0 | 0 | 1 |\n"
        "                dp_shard 1 | 2 | 3 |\n"
        "                           +---+---+\n"
        "dp_replicate 1  dp_shard 0 | 4 | 5 |\n"
        "                dp_shard 1 | 6 | 7 |\n"
        "                           +---+---+\n"
        "\n"
        "rank 0 is grouped\n"
        "  over dp_replicate with 0, 4\n"
        "  over dp_shard     with 0, 2\n"
        "  over tp           with 0, 1"
    )


SMALL = [
    dict(zip(AXES, degrees, strict=True))
    for degrees in itertools.product((1, 2, 3, 4, 8, 16), repeat=5)
    if 1 < math.prod(degrees) <= 16
]


@pytest.mark.parametrize("num_axes", [1, 2, 3, 4])
def test_up_to_16_ranks_all_are_drawn_where_they_are(num_axes: int) -> None:
    meshes = [d for d in SMALL if sum(n > 1 for n in d.values()) == num_axes]
    assert meshes
    for degrees in meshes:
        dims = Dims(**degrees)
        grid = draw_mesh(dims).split("\n\n")[1].splitlines()
        assert max(map(len, grid)) <= 80
        assert read_grid(grid, dims) == {
            rank: dims.coordinates(rank) for rank in range(dims.world_size)
        }


def read_grid(grid: list[str], dims: Dims) -> dict[int, dict[str, int]]:
    """Rank -> coordinates, read off the drawing as a person does: labels left and above."""
    columns = [int(number) for number in re.findall(r"\d+", grid[0])]
    across = grid[0].split()[0]
    here = dict.fromkeys(AXES, 0)
    found = {}
    for line in grid[1:]:
        if "|" not in line:
            continue
        label, *cells = line.rstrip("|").split("|")
        here.update({axis: int(at) for axis, at in re.findall(r"(\w+) (\d+)", label)})
        for column, cell in zip(columns, cells, strict=True):
            found[int(cell)] = {**here, across: column}
    return found


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 1024},
        {"dp_shard": 16, "tp": 64},
        {"dp_replicate": 512, "tp": 2},
        {"pp": 8, "dp_shard": 16, "tp": 8},
        {"pp": 8, "dp_replicate": 4, "dp_shard": 4, "cp": 2, "tp": 4},
    ],
)
def test_1024_ranks_stay_a_small_drawing(degrees: dict[str, int]) -> None:
    dims = Dims(**degrees)
    text = draw_mesh(dims)
    lines = text.splitlines()
    assert lines[0].endswith("= 1024 ranks")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 36
    assert "..." in text
    # What is drawn is still right: every label and every rank of the cells that are there.
    grid = text.split("\n\n")[1].splitlines()
    drawn = [
        int(number)
        for line in grid
        if "|" in line
        for number in re.findall(r"\d+", line.split("|", 1)[1])
    ]
    assert drawn == sorted(set(drawn))
    assert drawn[0] == 0
    assert drawn[-1] < 1024
    assert text.isascii()
