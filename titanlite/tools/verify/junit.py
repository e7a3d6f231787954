"""Results of verified jobs as JUnit XML, which CI systems show: `verify --junit`; torch-free."""

import re
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

# What XML 1.0 cannot contain, such as the colors of a terminal.
ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Case(NamedTuple):
    """A job, or a plan of a matrix, that was verified."""

    name: str
    seconds: float
    failure: str = ""
    """The verdict and the cause; "" if it agrees."""
    text: str = ""
    """All that is printed of it."""


def to_junit(cases: Sequence[Case]) -> str:
    """One test suite with a test case for each job or plan."""
    failures = sum(bool(case.failure) for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
    seconds = f"{sum(case.seconds for case in cases):.3f}"
    suite = ElementTree.Element(
        "testsuite", {"name": "titanlite verify", **counts, "time": seconds}
    )
    for case in cases:
        about = {"classname": "titanlite.verify", "name": case.name, "time": f"{case.seconds:.3f}"}
        one = ElementTree.SubElement(suite, "testcase", _legal(about))
        if case.failure:
            failure = ElementTree.SubElement(one, "failure", _legal({"message": case.failure}))
            failure.text = ILLEGAL.sub("?", case.text)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "utf-8", xml_declaration=True).decode() + "\n"


def _legal(attributes: dict[str, str]) -> dict[str, str]:
    return {name: ILLEGAL.sub("?", text) for name, text in attributes.items()}
