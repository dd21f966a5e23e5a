"""Unequal shares are refused."""

from mgpu_tutorial.mixed_precision import precision


def train(rank, world_size):
    return precision.train_scaled(rank, world_size, precision.finish_step)


def test_twenty_four_images_are_no_equal_shares_for_five(refused):
    refused(5, ValueError("24 images"), train)  # four of them would have more
