"""Helps to test a job that uses flashckpt: several nodes on one machine, and a network that misbehaves."""

from flashckpt.testing.cluster import Cluster
from flashckpt.testing.launch import Launch, Process
from flashckpt.testing.node import Node
from flashckpt.testing.proxy import Proxy
from flashckpt.testing.trainers import Trainers

__all__ = ["Cluster", "Launch", "Node", "Process", "Proxy", "Trainers"]
