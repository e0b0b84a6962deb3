"""The same hooks in another process: how far its numbers are from theirs is the noise."""

from peers.raw import *  # noqa: F403

TITLE = "raw hooks, again"
