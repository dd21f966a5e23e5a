"""Non-blocking: start a transfer now, work meanwhile, wait for it later."""
