"""Rollouts of a trainer that is a program of Ray's: docs/rollouts.md."""

from rayfin.actors.weights.buckets import put
from rayfin.deployments.offline.connect import connect

__all__ = ["connect", "put"]
