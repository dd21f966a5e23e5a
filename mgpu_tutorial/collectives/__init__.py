"""Collectives: operations that every rank of a group calls together."""
