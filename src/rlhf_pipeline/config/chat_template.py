"""Parameters of chat templates."""

from datetime import date

TEMPLATE_DATE = date(2024, 7, 26)
"""The default of `template_date`. Llama 3.1's template has this date where no clock is at hand."""
