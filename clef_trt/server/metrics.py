"""What Prometheus is told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from .. import __version__
from .batcher import PassReport
from .decide import STAGES, Decision

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
RECORDS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Metrics:
    """One registry per server, so that two in a process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge("clef_info", "1, with the version", ["version"], registry=registry).labels(__version__).set(1)
        self.ready = Gauge("clef_ready", "1 when requests are taken", registry=registry)
        self.inside = Gauge(
            "clef_requests_inside", "Requests between their first byte and their answer", registry=registry
        )
        self.waiting = Gauge("clef_queue_requests", "Encoded requests that wait for a pass", registry=registry)
        self._requests = Counter("clef_requests", "Responses", ["route", "status"], registry=registry)
        self._refusals = Counter("clef_refusals", "Requests not answered, by kind", ["kind"], registry=registry)
        self._seconds = Histogram(
            "clef_request_seconds", "From the first byte to the answer", ["route"], registry=registry, buckets=SECONDS
        )
        self._stages = Histogram(
            "clef_stage_seconds", "Of an answered request", ["stage"], registry=registry, buckets=SECONDS
        )
        self._tokens = Histogram("clef_request_tokens", "Of a record", registry=registry, buckets=TOKENS)
        self._truncated = Counter("clef_truncated_tokens", "Of states cut to fit", registry=registry)
        self._questions = Counter("clef_questions", "Questions answered", registry=registry)
        self._media = Counter("clef_media", "Images and videos decided about", registry=registry)
        self._records = Histogram("clef_batch_records", "Records of a pass", registry=registry, buckets=RECORDS)
        self._pass_seconds = Histogram("clef_pass_seconds", "Of a pass", registry=registry, buckets=SECONDS)
        self._pass_tokens = Counter("clef_pass_tokens", "Tokens of all passes", ["kind"], registry=registry)
        self._faults = Counter("clef_engine_faults", "Passes that failed", registry=registry)
        for stage in STAGES:
            self._stages.labels(stage)

    def responded(self, route: str, status: int, kind: str | None, spent_s: float) -> None:
        """A response went out. `kind`: why it is a refusal."""
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(spent_s)
        if kind is not None:
            self._refusals.labels(kind).inc()

    def refused(self, kind: str) -> None:
        """A request within a batch was not answered."""
        self._refusals.labels(kind).inc()

    def decided(self, decision: Decision) -> None:
        """A request was answered."""
        self._tokens.observe(decision.tokens)
        self._truncated.inc(decision.truncated_tokens)
        self._questions.inc(decision.questions)
        self._media.inc(decision.media)
        for stage, spent_ms in decision.stages_ms.items():
            self._stages.labels(stage).observe(spent_ms / 1000)

    def passed(self, report: PassReport) -> None:
        """A pass has run."""
        self._records.observe(report.records)
        self._pass_seconds.observe(report.spent_s)
        self._pass_tokens.labels("record").inc(report.tokens)
        self._pass_tokens.labels("padding").inc(report.padded_tokens - report.tokens)
        if report.failed:
            self._faults.inc()

    def text(self) -> bytes:
        """The page of /metrics."""
        return generate_latest(self._registry)
