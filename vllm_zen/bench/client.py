"""vLLM's own benchmark client, callable where its `vllm` command does not start.

python -m vllm_zen.bench.client [the options of `vllm bench serve`]
"""


def main() -> None:
    """Parses the options of `vllm bench serve` and runs it."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
