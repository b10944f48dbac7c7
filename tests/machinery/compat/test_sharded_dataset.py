"""cycling_utils' dataset of which each process has a share: which samples, and in which form."""

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from lib.utils.compat.sharded_dataset import DistributedShardedDataset, shard_places

COUNT = 23  # training images; none of the numbers of ranks below divides it


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """DATA with train/ (2 classes). The pixel value of an image is its number."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(COUNT):
        file = folder / "train" / ("ant" if number < 9 else "bee") / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (number, number, number)).save(file)
    return folder


def numbers(samples):
    return [int(sample.flatten()[0]) for sample in samples]


def load(data, rank, world_size, pct, **options):
    options = {"device_id": "cpu", "sample_load_transform": pil_to_tensor, **options}
    return DistributedShardedDataset(data / "train", rank, world_size, pct, **options)


def test_each_rank_has_its_share_with_its_targets_as_the_seed_says_and_global_generators_do_not_change(data):
    shards = [load(data, rank, 4, 1 / 4) for rank in range(4)]
    assert sorted(number for shard in shards for number in numbers(shard.samples)) == list(range(COUNT))
    for shard in shards:
        assert all((number >= 9) == int(target) for number, target in zip(numbers(shard.samples), shard.targets))
    state = torch.get_rng_state()
    first, again = (numbers(load(data, 0, 3, 1 / 3, seed=1).samples) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first == again != numbers(load(data, 0, 3, 1 / 3, seed=2).samples)
    assert numbers(load(data, 1, 3, 1 / 3, shuffle=False).samples) == list(range(1, COUNT, 3))


def test_shares_of_every_size_are_distinct_and_together_complete():
    for n in range(1, 25):
        for world_size in range(1, n + 1):
            for pct in {1 / world_size, min(1.0, 1.5 / world_size), 1.0}:
                shares = [shard_places(n, rank, world_size, pct=pct).tolist() for rank in range(world_size)]
                assert all(len(set(share)) == len(share) for share in shares)
                assert len({len(share) for share in shares}) == 1 or pct == 1 / world_size
                assert set().union(*shares) == set(range(n))
                assert max(map(len, shares)) - min(map(len, shares)) <= 1
                assert pct > 1 / world_size or sum(map(len, shares)) == n
