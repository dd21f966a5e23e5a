"""Show source, check answers, keep what is built."""
