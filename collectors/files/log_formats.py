"""Line formats of access logs: nginx's and Envoy's usual ones, and any that is written as nginx (``$name``) or Envoy (``%NAME%``)
writes it, made into a regular expression with a group per variable.

nginx: ngx_http_log_module (``combined``, ``$request_time`` s from the first byte read to the last one sent, ``$time_local`` and
``$msec`` when the line was written, which is the request's end). Envoy: "Access logging", default format (``%START_TIME%``,
``%DURATION%`` ms from the start to the last byte out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hoptrace.errors import UsageError

__all__ = ["LineFormat", "line_format", "sniff_json", "sniff_line"]


@dataclass(frozen=True, slots=True)
class LineFormat:
    """``pattern`` (null for JSON lines) with its named ``columns``, and the ``mapping`` that goes with it where none is given."""

    name: str
    pattern: str | None
    columns: tuple[str, ...]
    mapping: str | None


_NGINX = '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent"'
_ENVOY_TAIL = (
    '%BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "%REQ(X-FORWARDED-FOR)%" '
    '"%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" "%REQ(:AUTHORITY)%" "%UPSTREAM_HOST%"'
)
_ENVOY = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% %RESPONSE_FLAGS% '
    + _ENVOY_TAIL
)
_ISTIO = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% %RESPONSE_FLAGS% '
    '%RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% "%UPSTREAM_TRANSPORT_FAILURE_REASON%" ' + _ENVOY_TAIL
)

# What well-known variables mean, in the order in which they are preferred.
_MEANINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("finish", ("msec:s", "time_iso8601:iso8601", "time_local:nginx")),
    ("arrival", ("start_time:iso8601",)),
    ("duration_s", ("request_time",)),
    ("duration_ms", ("duration",)),
    ("status", ("status", "response_code")),
    ("request_id", ("request_id", "http_x_request_id", "x-request-id", "x_request_id", "req_x-request-id")),
    ("server", ("upstream_addr", "upstream_host")),
    ("path", ("request", "path", "uri", "request_uri", "req_x-envoy-original-path_path", "x-envoy-origin-path")),
)
_PLAIN = {"nginx": _NGINX, "envoy": _ENVOY, "istio": _ISTIO}
# After the combined format people write the times bare or as rt=…, in quotes or not.
_NGINX_TIMES = r'(?:.*?(?:^| |"|rt=|request_time[=:] ?)(?P<request_time>\d+\.\d{3})(?:[ ",].*|$))?'


def line_format(text: str) -> LineFormat:
    """A format by its name (nginx, envoy, istio), or as the server's own configuration writes it.

    Raises:
        UsageError: it names no variable, or one twice.
    """
    if text in _PLAIN:
        found = _compiled(text, _PLAIN[text])
        if text != "nginx" or found.pattern is None:
            return found
        pattern = found.pattern.removesuffix(r"\s*$") + _NGINX_TIMES + "$"
        columns = (*found.columns, "request_time")
        return LineFormat("nginx", pattern, columns, _meaning(columns))
    if "$" not in text and "%" not in text:
        raise UsageError(
            f"There is no log format {text!r}.",
            hint="Choose nginx, envoy or istio, or give the format itself: $remote_addr [$time_local] … or [%START_TIME%] …",
        )
    return _compiled("log", text)


def sniff_line(line: str) -> LineFormat | None:
    """The usual format that a line has."""
    for name in ("nginx", "istio", "envoy"):
        found = line_format(name)
        if found.pattern and re.match(found.pattern, line):
            return found
    return None


def sniff_json(keys: dict[str, Any]) -> LineFormat | None:
    """The meaning of a JSON access log whose lines have nginx's or Envoy's names."""
    nginx = "request_time" in keys and any(k in keys for k in ("msec", "time_iso8601", "time_local"))
    envoy = {"start_time", "duration", "response_code"} <= keys.keys()
    if not nginx and not envoy:
        return None
    return LineFormat("nginx JSON" if nginx else "Envoy JSON", None, tuple(keys), _meaning(tuple(keys)))


def _compiled(name: str, text: str) -> LineFormat:
    variables = re.compile(r"\$\{?(?P<n>\w+)\}?" if "$" in text else r"%(?P<n>[A-Z_]+(?:\([^)]*\))?(?::\d+)?)%")
    pattern, columns, at = "", [], 0
    for match in variables.finditer(text):
        literal, after = text[at : match.start()], text[match.end() : match.end() + 1]
        column = _column(match["n"])
        if column in columns:
            raise UsageError(f"The log format names {match['n']} twice.", hint="Give each variable once.")
        columns.append(column)
        pattern += _literal(literal)
        # A value ends where the format's next character stands; in quotes it may hold blanks.
        pattern += f"(?P<{_group(columns)}>" + (f"[^{re.escape(after)}]*" if after in ('"', "]", "[", "'") else r".*?") + ")"
        at = match.end()
    if not columns:
        raise UsageError("The log format names no variable.", hint='As in nginx\'s log_format: [$time_local] "$request" $status')
    pattern = "^" + pattern + _literal(text[at:]) + r"\s*$"
    return LineFormat(name, pattern, tuple(columns), _meaning(tuple(columns)))


def _literal(text: str) -> str:
    return re.sub(r"(?:\\ )+", " +", re.escape(text))


def _group(columns: list[str]) -> str:
    """Name of the newest column's group: groups take no dashes."""
    return re.sub(r"\W", "_", columns[-1])


def _column(variable: str) -> str:
    return re.sub(r"[^\w-]+", "_", variable.lower().split(":", 1)[0] if "(" not in variable else variable.lower()).strip("_")


def _meaning(columns: tuple[str, ...]) -> str | None:
    parts = []
    for target, names in _MEANINGS:
        found = next((n for n in names if n.split(":")[0] in columns), None)
        if found is not None:
            column, _, form = found.partition(":")
            parts.append(f'{target}="{column}"' + (f":{form}" if form else ""))
    return ",".join(parts) or None
