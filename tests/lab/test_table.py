"""A table as HTML: narrow pages break no name, and the page is no wider for it."""

from mgpu_tutorial.lab import Table


def test_a_table_scrolls_in_a_box_and_keeps_its_first_column_whole():
    page = Table(
        ["", "what", "n"], [["rank 0", "a long text", 1], ["rank 1", "b", 2]]
    )._repr_html_()
    assert page.startswith('<div style="overflow-x:auto"><table>')
    assert page.endswith("</table></div>")
    rows = page.split("<tr>")[1:]
    assert [row.count("white-space:nowrap") for row in rows] == [1, 1, 1]
    assert all(row.index("nowrap") < row.index("</t") for row in rows)  # the first cell
    assert rows[1].count("text-align:right") == 1
