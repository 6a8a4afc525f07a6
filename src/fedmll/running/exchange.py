"""One exchange with the round's clients: their replies, merged. Nothing of a reply that cannot be merged stays."""

from __future__ import annotations

import logging

from fedmll.engines.base import Engine
from fedmll.errors import RoundSpoilt, TooFewReplies
from fedmll.message import Tensors
from fedmll.methods.contract import Records
from fedmll.running.observers import Observer

Losses = list[tuple[float, float]]  # of each client, with its samples


def exchange(
    engine: Engine, state: Tensors, number: int, total: int, observer: Observer, log: logging.Logger
) -> tuple[Tensors, Records, Losses]:
    """Tried again where too few replies came, and without a client whose reply spoilt the sums."""
    attempt = 1
    while True:
        try:
            return _once(engine, state, number, total, observer)
        except RoundSpoilt as error:
            state, reason = error.instead or state, str(error)
        except TooFewReplies as error:
            if attempt == engine.tries:
                raise
            attempt, reason = attempt + 1, str(error)
        log.warning("round %d is tried again: %s", number, reason)
        observer.warning(f"Round {number} is tried again: {reason}")


def _once(
    engine: Engine, state: Tensors, number: int, total: int, observer: Observer
) -> tuple[Tensors, Records, Losses]:
    losses: Losses = []
    merger = engine.learner.method.merger(state, number)
    observer.client_done(number, 0, total)
    for peer, reply in engine.round(state, number):
        losses.append((reply.numbers["loss"], reply.numbers["samples"]))
        try:
            merger.add(peer, reply)
        except Exception as error:  # half of it may be in the sums: they are made anew, or the run ends
            engine.fault(error, peer)
        observer.client_done(number, len(losses), total)
    try:
        return *merger.result(), losses
    except Exception as error:  # no reply is to blame alone; between machines the model stays as it was
        engine.fault(error, None)
        return state, {}, losses
