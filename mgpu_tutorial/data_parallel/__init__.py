"""DataParallel taken apart: one process, one thread per device, all through the first."""
