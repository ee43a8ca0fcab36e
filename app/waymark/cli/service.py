"""The flags of commands that ask a running Waymark over HTTP."""

from __future__ import annotations

import argparse
import os

from waymark.console.arguments import add_tokens

DEFAULT_URL = "http://127.0.0.1:13333"


def add_service(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the service's address, the tenant, and the output."""
    parser.add_argument("--url", help=f"the URL of Waymark; the default is WAYMARK_URL, else {DEFAULT_URL}")
    parser.add_argument("--tenant-id", help="the tenant; the default is 'default'")
    parser.add_argument("--api-token", help="the bearer token; the default is WAYMARK_API_TOKEN")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the prompt: exactly one of its forms, and its options."""
    parser.add_argument("--model", help="the name of the model; the default is the only one that is registered")
    exclusive = parser.add_mutually_exclusive_group(required=True)
    add_tokens(exclusive)
    exclusive.add_argument(
        "--text", help="a text, which the model's tokenizer makes into tokens; - reads standard input"
    )
    exclusive.add_argument("--file", help="a file with the text of the prompt; - reads standard input")
    exclusive.add_argument(
        "--messages", metavar="FILE", help="a JSON file with the messages of a chat; - for standard input"
    )
    parser.add_argument("--block-size", type=int, help="tokens per block; the default is the block size of the engines")
    parser.add_argument("--lora", help="the name of the adapter")
    parser.add_argument("--cache-salt", help="the cache salt of the request")


def settle(arguments: argparse.Namespace) -> None:
    """Fill in from the environment the values without a flag."""
    arguments.url = arguments.url or os.environ.get("WAYMARK_URL") or DEFAULT_URL
    arguments.api_token = arguments.api_token or os.environ.get("WAYMARK_API_TOKEN") or None
