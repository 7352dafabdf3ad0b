"""The conformance suite: cases, the rules they are judged by, the runner, reports and a pytest plug-in."""
