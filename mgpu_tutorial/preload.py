"""What chapters import slowly: the lab's fork server imports it once, for all ranks."""

import mgpu_tutorial.shared.vision  # noqa: F401  (torchvision: a quarter of a second a rank)
