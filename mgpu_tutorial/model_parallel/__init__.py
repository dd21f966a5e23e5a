"""Model parallel: each device has a part of ResNet-50 and hands on activations."""
