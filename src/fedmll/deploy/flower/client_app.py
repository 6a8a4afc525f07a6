"""The ClientApp: any method of the registry at a site.

Between messages it keeps only what is on the site's disk and, as long as the process lives, the loaded data and model;
so it runs on every Flower runtime. It trusts no message: sender, type and content are checked. What leaves the site is
a reply of the method, or an error code.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedmll.core.errors import FedmllError
from fedmll.core.message import Message
from fedmll.core.text import printable
from fedmll.deploy.error_codes import (
    MAX_TEXT,
    SiteError,
    SiteErrorCode,
    describe_rejection,
    error_code,
    printable_block,
)
from fedmll.deploy.experiment_for_sites import StudySetup
from fedmll.deploy.flower.flower_internals import SUPERLINK_NODE_ID, ErrorCode
from fedmll.deploy.flower.records import Info, from_records, to_records
from fedmll.deploy.security.audit_log import SERVER_HEAD, AuditHead, AuditLog, describe_message
from fedmll.deploy.site.approval import SetupRecord, read_setup_record, write_setup_record
from fedmll.deploy.site.site_config import SERVER_CERTIFICATE, read_site_file
from fedmll.deploy.site.worker import SiteWorker, delete_client_state
from fedmll.methods.framework.method import Method

HELLO, TRAIN, EVALUATE, MODEL, BYE = "query.hello", "train", "evaluate", "query.model", "query.bye"
MESSAGE_TYPES = (HELLO, TRAIN, EVALUATE, MODEL, BYE)


class SiteApp(ClientApp):
    """Answers the server's messages of known types. Other messages are ignored and shown."""

    def __call__(self, message: FlowerMessage, context: Context) -> FlowerMessage:
        metadata = message.metadata
        if metadata.src_node_id != SUPERLINK_NODE_ID or metadata.run_id != context.run_id:
            return _ignore(message, f"a message from node {metadata.src_node_id}, which is not the server of this run")
        if metadata.message_type not in MESSAGE_TYPES:
            return _ignore(message, f"a message of the unknown type '{metadata.message_type}'")
        return super().__call__(message, context)


@dataclass
class JoinState:
    """The state of the join that this process serves."""

    run_ended: bool = False  # the server of the run has said so
    not_approved: str = ""  # why the study was not approved
    worker_with_model: SiteWorker | None = None  # the worker that received the final model
    last_error: str = ""  # that was shown: a server that repeats its request causes no further lines
    rejections_shown: list[str] = field(default_factory=list)


app = SiteApp()
join_state = JoinState()
Answer = tuple[Message, Info]
Handler = Callable[[Path, Info, Message], Answer]  # (the site's file, the server's info, its message)

_workers: dict[tuple[str, str], SiteWorker] = {}  # only the newest; by the content of the site's file and the setup


def show(text: str) -> None:
    print(printable(text, MAX_TEXT), flush=True)


def show_block(text: str) -> None:
    print(printable_block(text), flush=True)


def show_once(text: str, show_text: Callable[[str], None] = show) -> None:
    """Show an error unless it is the same as the last one."""
    if text != join_state.last_error:
        show_text(text)
    join_state.last_error = text


@app.query("hello")
def hello(message: FlowerMessage, context: Context) -> FlowerMessage:
    def handle(file: Path, info: Info, _: Message) -> Answer:
        rejection = describe_rejection(info.get("rejected"))
        if rejection is not None and rejection not in join_state.rejections_shown:
            join_state.rejections_shown.append(rejection)
            show(rejection)
        return Message(), _introduction(file, info)

    return _answer(message, context, handle)


@app.train()
def train(message: FlowerMessage, context: Context) -> FlowerMessage:
    def handle(file: Path, info: Info, content: Message) -> Answer:
        worker, start = _worker(file, info), time.perf_counter()
        round, state_round, keep_rounds = _parse_rounds(info, worker.trainer.method)
        with _limited_work(file, worker, TRAIN, round):
            reply, has_state = worker.train(content, round, state_round, keep_rounds)
        show(f"round {round}: loss {reply.numbers['loss']:.4g}, {time.perf_counter() - start:.1f} s")
        return reply, {"has_state": has_state}

    return _answer(message, context, handle)


@app.evaluate()
def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
    def handle(file: Path, info: Info, content: Message) -> Answer:
        worker = _worker(file, info)
        round, _, _ = _parse_rounds(info, worker.trainer.method)
        with _limited_work(file, worker, EVALUATE, round):
            return worker.evaluate(content), {}

    return _answer(message, context, handle)


@app.query("model")
def model(message: FlowerMessage, context: Context) -> FlowerMessage:
    def handle(file: Path, info: Info, content: Message) -> Answer:
        worker = _worker(file, info)
        show(f"the federated model is in {worker.receive_model(content, info.get('digest')).file}")
        join_state.worker_with_model = worker
        return Message(), {}

    return _answer(message, context, handle)


@app.query("bye")
def bye(message: FlowerMessage, context: Context) -> FlowerMessage:
    def handle(file: Path, info: Info, _: Message) -> Answer:
        run = StudySetup.from_json(info.get("setup", "")).run
        record = read_setup_record(file)
        known = {worker.run for worker in _workers.values()} if record is None else {record.setup["run"]}
        if known and run not in known:  # a process that has served no run belongs to a simulation
            text = f"The end of the run '{run}', in which this site does not take part, is ignored."
            raise SiteError(SiteErrorCode.MESSAGE, text)
        delete_client_state(read_site_file(file), run)
        join_state.run_ended = True
        return Message(), {}

    return _answer(message, context, handle)


def _answer(message: FlowerMessage, context: Context, handle: Handler) -> FlowerMessage:
    """Handle a message and create the reply.

    An error is shown at the site in full; the server receives its code. Everything that leaves is in the audit log
    before it leaves.
    """
    name, audit, facts = "", None, {"kind": message.metadata.message_type}
    try:
        file = _site_file(context)
        site = read_site_file(file)
        name, audit = site.name, AuditLog(site.state_dir)
        content, info = from_records(message.content)
        facts |= _study_digest(info)
        reply, reply_info = handle(file, info, content)
        audit.write(
            "left", **facts, **_audit_facts(info, reply_info), **_server_head(info, file), **describe_message(reply)
        )
    except FedmllError as error:
        show_once(f"error: {error}")
        reply, reply_info = Message(), {"error": error_code(error).value}
        if isinstance(error, SiteError) and error.code is SiteErrorCode.APPROVAL:
            join_state.not_approved = str(error)
    except Exception as error:
        show_once(traceback.format_exc(), show_block)
        reply, reply_info = Message(), {"error": error_code(error).value}
    if "error" in reply_info and audit is not None:
        with suppress(OSError):  # the disk may be full; only a code leaves, and the error was shown
            audit.write("rejected", **facts, code=reply_info["error"])
    return FlowerMessage(to_records(reply, reply_info | {"name": name}), reply_to=message)


def _study_digest(info: Info) -> dict[str, Any]:
    """For the audit log: the digest of the study that a message belongs to."""
    try:
        return {"study": StudySetup.from_json(info.get("setup", "")).digest}
    except SiteError:
        return {}


def _audit_facts(info: Info, reply_info: Info) -> dict[str, Any]:
    """For the audit log: the round, which other values leave, and the numbers of images in them."""
    facts = {"round": info["round"]} if "round" in info else {}
    facts |= {"info": sorted({*reply_info, "name"})}
    return facts | {name: reply_info[name] for name in ("samples", "held_out") if name in reply_info}


def _server_head(info: Info, file: Path) -> dict[str, Any]:
    """For the audit log: the head of the server's audit log. Whoever changes that one would have to change this one.

    Its signature is checked with the certificate that the server has shown to this site.
    """
    if "audit_head" not in info:
        return {}
    head, certificate = AuditHead.from_json(info["audit_head"]), file.with_name(SERVER_CERTIFICATE)
    if head is None or (certificate.is_file() and not head.is_signed_by(certificate.read_bytes())):
        show_once("warning: the head of the server's audit log is not signed with the server's key; it is not kept")
        return {"server_head_valid": False}
    return {SERVER_HEAD: asdict(head)}


def _ignore(message: FlowerMessage, subject: str) -> FlowerMessage:
    show_once(f"ignored: {printable(subject, 200)}")
    return FlowerMessage(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ignored"), reply_to=message)


def _parse_rounds(info: Info, method: Method) -> tuple[int, int | None, list[int] | None]:
    """The round to train, the round of the client state to start from, and the rounds of the states to keep.

    Files are named after these numbers, so they are validated.
    """
    round, state_round, keep = info.get("round"), info.get("state_round"), info.get("keep_rounds")
    kept = keep if isinstance(keep, list) else []
    numbers = [round, *([] if state_round is None else [state_round]), *kept]
    last = method.task.rounds
    first, last = min([0, *method.exchange_rounds("opening")]), max([last + 1, *method.exchange_rounds("closing")])
    if not all(type(number) is int and first <= number <= last for number in numbers) or keep not in (None, kept):
        raise SiteError(SiteErrorCode.MESSAGE, "The server's message does not say correctly which round it is for.")
    assert isinstance(round, int)
    return round, state_round, keep


@contextmanager
def _limited_work(file: Path, worker: SiteWorker, kind: str, round: int) -> Iterator[None]:
    """Count a training or a test of this join, and its time; a SiteError if a limit of the site is reached."""
    record = read_setup_record(file)
    assert record is not None
    record, start = record.begin_work(kind, round, worker.site.limits.max_hours), time.perf_counter()
    write_setup_record(file, record)
    try:
        yield
    finally:
        write_setup_record(file, replace(record, seconds=record.seconds + time.perf_counter() - start))


def _introduction(file: Path, info: Info) -> Info:
    """The site answers one setup per join. For the same setup it sends the same answer, without computing it again."""
    setup = _setup(info)
    record = _read_record(file, setup)
    if record is not None and record.answer is not None:
        return record.answer
    introduction = _worker(file, info).introduce()
    record = read_setup_record(file) or SetupRecord(setup.values)
    write_setup_record(file, replace(record, answer=introduction))
    return introduction


def _worker(file: Path, info: Info) -> SiteWorker:
    """The worker for the only setup of this join."""
    setup = _setup(info)
    record = _read_record(file, setup)
    key = (file.read_text(), setup.to_json())
    if key not in _workers:
        _workers.clear()
        _workers[key] = SiteWorker(read_site_file(file), setup, show)
    if record is None:
        write_setup_record(file, SetupRecord(setup.values))
    return _workers[key]


def _read_record(file: Path, setup: StudySetup) -> SetupRecord | None:
    """What this join has answered; a SiteError if that was another setup."""
    record = read_setup_record(file)
    if record is not None:
        record.check_same_setup(setup.values)
    return record


def _setup(info: Info) -> StudySetup:
    setup = info.get("setup")
    if not isinstance(setup, str):
        raise SiteError(SiteErrorCode.MESSAGE, "The server's message does not say which study it belongs to.")
    return StudySetup.from_json(setup)


def _site_file(context: Context) -> Path:
    """The file with the site's configuration."""
    return Path(str(context.node_config["site"]))
