"""Why a client is refused, in words that say nothing of anybody else. Only the short name travels; the words are those
of the fedmll that is installed at the client, so that a server cannot put its own on a client's screen."""

from __future__ import annotations

import re

CODE = 9000  # beside Flower's own error codes
CLOCK, TWICE, REVOKED, UNKNOWN = "clock", "twice", "revoked", "unknown"
TOLD = re.compile(rf"\[code: {CODE}\] fedmll refuses: ([a-z]+)(?: (-?[0-9]{{1,12}}))?")

# What the roster finds wrong with an introduction → its short name, and what the client is told
WRONG = {
    "calls itself": ("name", "your key belongs to another name; join with the --name that the operator gave you"),
    "it only validates": ("validating", "you are a client of this run; take part by `fedmll join`"),
    "it trains, and": ("training", "you only validate in this run; come by `fedmll validate`"),
    "not among the clients": ("uninvited", "this run does not take your name; ask its operator"),
    "excluded by the operator": (
        "excluded",
        "the operator has taken you out of this run; stay connected, you may be taken back, or ask the operator",
    ),
    "another node is connected": ("taken", "somebody is connected under your name already"),
    "it has the class": ("classes", "you have a class that this federation does not have; see --classes"),
    "what is frozen in its model": (
        "frozen",
        "what your model does not train is not what the server has: use the same text encoder, weights and versions",
    ),
    "its data changed": ("changed", "your images or labels are not those that this run began with; put them back"),
    "does not say properly": (
        "introduction",
        "what you say of your data is not understood; is it the same fedmll?",
    ),
}
OTHER = ("other", "ask the server's operator, whose log has the reason")


def short_name(why: str) -> str:
    """Of a refusal by the roster."""
    return next((name for words, (name, _) in WRONG.items() if words in why), OTHER[0])


def advice(name: object) -> str | None:
    """What a client is told, if the server says that it was refused."""
    known = dict([*WRONG.values(), OTHER])
    return f"the server refused you: {known.get(name, OTHER[1])}" if isinstance(name, str) else None


def announced(name: str, seconds: float | None = None) -> str:
    """How the port says it, in a form that survives Flower's own log."""
    return f"fedmll refuses: {name}" + ("" if seconds is None else f" {round(seconds)}")


def heard(said: str, server: str, name: str, key: object) -> str | None:
    """The last refusal by the port in what a SuperNode wrote, as a paragraph for the client's user."""
    found = TOLD.findall(said)
    if not found:
        return None
    why, seconds = found[-1]
    if why == CLOCK:
        off = int(seconds or 0)
        way = "ahead of" if off > 0 else "behind"
        return (
            f"The clock of this machine is {abs(off)} s {way} the server's, so its messages do not count as fresh. Set "
            "it right (timedatectl set-ntp true, or ask your administrator), then join again."
        )
    if why == TWICE:
        return (
            f"Another program is connected to {server} with the same key ({key}), so this one is refused. Stop that "
            "one first. If it is not yours, tell the server's operator: the key must be revoked and replaced."
        )
    if why == REVOKED:
        return (
            f"The operator of {server} has revoked this key ({key}). Make a new one by `fedmll keys rotate {name}` and "
            "send its .pub."
        )
    if why == UNKNOWN:
        return (
            f"{server} does not know the key of {name}. Send the public key ({name}.pub, made by `fedmll keys new "
            f"{name}`) to its operator, who puts it beside the server's keys and starts it again."
        )
    return None
