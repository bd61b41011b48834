"""Protobuf messages ↔ the names of things: launches, generations, shards."""

from __future__ import annotations

from flashckpt.rpc.checks import integer, needed, refused
from flashckpt.rpc.checks import world as checked_world
from flashckpt.types import Generation, Launch, ShardId
from flashckpt.v1 import common_pb2


def to_launch(launch: Launch) -> common_pb2.Launch:
    return common_pb2.Launch(epoch=launch.epoch, nonce=launch.nonce)


def from_launch(message: common_pb2.Launch) -> Launch:
    return Launch(integer(message.epoch, "epoch"), message.nonce)


def to_generation(generation: Generation) -> common_pb2.Generation:
    return common_pb2.Generation(
        epoch=generation.epoch, nonce=generation.nonce, step=generation.step, seq=generation.seq
    )


def from_generation(message: common_pb2.Generation) -> Generation:
    return Generation(
        integer(message.epoch, "epoch"), message.nonce, integer(message.step, "step"), integer(message.seq, "seq")
    )


def to_shard(shard: ShardId) -> common_pb2.ShardId:
    return common_pb2.ShardId(generation=to_generation(shard.generation), rank=shard.rank, world=shard.world)


def from_shard(message: common_pb2.ShardId) -> ShardId:
    generation = needed(message, "generation", from_generation)
    world = checked_world(message.world)
    if message.rank >= world:
        raise refused("rank", f"less than world {world}", message.rank)
    return ShardId(generation, message.rank, world)
