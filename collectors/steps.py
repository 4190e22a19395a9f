"""The engine's iterations, reconstructed at the end of a capture and stored with the rest."""

from __future__ import annotations

from hoptrace.writer import TraceWriter

__all__ = ["store_steps"]


def store_steps(writer: TraceWriter) -> str | None:
    """Reconstruct the engine's iterations from what was recorded and store them with the rest; why not, if that can't be done."""
    writer.flush()
    try:
        # Polars takes half a second to import: not while a capture is to begin.
        from hoptrace import reconstruct
        from hoptrace.reader import open_trace

        steps = reconstruct.steps_of(open_trace(writer.path))
        reconstruct.store_steps(writer, steps)
    except Exception as e:  # what was recorded is worth more than what can be derived from it, now or later
        return f"steps could not be reconstructed ({type(e).__name__}: {e})"
    return None if steps.steps.height else steps.note
