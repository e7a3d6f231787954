import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.tools.lab import Mesh, MeshError

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(**dict(zip("abcd", sizes, strict=False)))
)


def test_ranks_are_row_major_and_groups_follow_the_axes_given():
    mesh = Mesh(x=2, y=4)
    assert mesh.size == 8
    assert [mesh.rank(index) for index in mesh] == list(range(8))
    assert str(mesh.index(6)) == "x=1, y=2"
    assert mesh.index(6)["y"] == 2
    assert mesh.group(mesh.index(6), ["y"]) == (4, 5, 6, 7)
    assert mesh.group(mesh.index(6), ["x"]) == (2, 6)
    assert mesh.group(mesh.index(6), ["y", "x"]) == (0, 4, 1, 5, 2, 6, 3, 7)


@given(meshes, st.data())
def test_groups_part_the_mesh(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    groups = [mesh.group(index, axes) for index in mesh]
    assert all(len(group) == mesh.degree(axes) for group in groups)
    assert all(rank in groups[rank] for rank in range(mesh.size))
    assert sorted(rank for group in set(groups) for rank in group) == list(range(mesh.size))
    assert all(mesh.index(mesh.rank(index)) == index for index in mesh)


def test_what_cannot_be_is_refused():
    with pytest.raises(MeshError, match="mesh axis x: the size is 0; it must be at least 1"):
        Mesh(x=0)
    with pytest.raises(MeshError, match=r"Mesh\(x=2, y=4\) has no axis 'z'; it has x, y"):
        Mesh(x=2, y=4).degree(["z"])
    with pytest.raises(MeshError, match="axes x, x: an axis can be used only once"):
        Mesh(x=2).degree(["x", "x"])
    with pytest.raises(MeshError, match="rank 8 is not on"):
        Mesh(x=2, y=4).index(8)
