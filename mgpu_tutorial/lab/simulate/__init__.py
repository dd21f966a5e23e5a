"""What this machine has not: several devices, a slow link."""
