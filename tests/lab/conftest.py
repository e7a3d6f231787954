"""One running cluster for all lab tests; each test sets its own mesh."""

from pathlib import Path

import pytest

from titanlite.tools.lab import Mesh, VirtualCluster

CLUSTERS: list[VirtualCluster] = []


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the devices after the last of these tests: each idle one takes 3% of a core."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for cluster in CLUSTERS:
            cluster.close()


@pytest.fixture(scope="session")
def _cluster_of_8():
    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        CLUSTERS.append(cluster)
        yield cluster


@pytest.fixture
def cluster(_cluster_of_8):
    """Eight devices, 2 x 4."""
    _cluster_of_8.mesh = Mesh(x=2, y=4)
    _cluster_of_8.algorithm = "naive"
    return _cluster_of_8


@pytest.fixture(scope="session")
def cluster_of_4():
    """Four devices whose process group is the whole world, for code that uses torch.distributed."""
    with VirtualCluster(Mesh(rank=4)) as cluster:
        CLUSTERS.append(cluster)
        yield cluster
