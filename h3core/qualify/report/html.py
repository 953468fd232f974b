"""report.html: one self-contained page, of which the first screen is enough to act on.

No script, no address outside the page, and a content security policy that would forbid both. Every string of the run
goes through Jinja's autoescape.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from h3core.qualify.report import view
from h3core.qualify.report.charts import strip, tiles
from h3core.qualify.report.matrix import MARKS, matrix, state, summary, unlisted, world_label
from h3core.qualify.report.schema import Report, ReportError, package_text
from h3core.qualify.report.text import cleaned, count, listed, plural, seconds, shortened

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE: Final = "report.html.jinja"


def html(report: Report) -> str:
    """A valid report as one HTML page. Raises `ReportError` where jinja2 is not installed."""
    return _template().render(_context(cleaned(report))) + "\n"


@cache
def _template() -> Template:
    try:
        # Here, and not above: a report is read and compared without it.
        import jinja2
    except ImportError:
        raise ReportError("report.html: got no jinja2, expected it; pip install 'h3core[qualify]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(package_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"count": count, "listed": listed, "seconds": seconds, "plural": plural, "shortened": shortened}
    environment.filters |= filters
    return environment.get_template(TEMPLATE)


def _context(report: Report) -> dict[str, Any]:
    table = matrix(report)
    return {
        "report": report,
        "view": view,
        "groups": view.groups(report),
        "missing": view.missing_by_reason(report),
        "findings": view.preflight(report),
        "rows": [(row, state(row)) for row in [*report["checks"], *unlisted(report)]],
        "matrix": table,
        "matrix_summary": summary(table),
        "tiles": tiles(table),
        "strip": strip(table),
        "marks": MARKS,
        "world_label": world_label,
    }
