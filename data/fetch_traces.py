"""Get the four public trace files, which this project may not ship, and check every byte.

python data/fetch_traces.py                download them into data/traces/ (5 MB)
python data/fetch_traces.py --from DIR     take copies from DIR, plain or .gz
"""

import argparse
import gzip
import hashlib
import urllib.request
from pathlib import Path

AZURE = "Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
MOONCAKE = "kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces"
# name here: (path at raw.githubusercontent.com, bytes, sha256)
TRACES = {
    "azure_llm_inference_2023_code.csv": (
        f"{AZURE}/AzureLLMInferenceTrace_code.csv",
        320117,
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    "azure_llm_inference_2023_conv.csv": (
        f"{AZURE}/AzureLLMInferenceTrace_conv.csv",
        719188,
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "mooncake_conversation_trace.jsonl": (
        f"{MOONCAKE}/conversation_trace.jsonl",
        3029533,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "mooncake_synthetic_trace.jsonl": (
        f"{MOONCAKE}/synthetic_trace.jsonl",
        1136313,
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
}


def read_checked(name, folder=None):
    """Return a trace file's bytes, from a folder or from GitHub.

    Parameters
    ----------
    name : str
        One of `TRACES`.
    folder : Path, optional
        Where copies lie, plain or .gz; by default the file is downloaded.

    Returns
    -------
    bytes
        The content, unpacked.

    Raises
    ------
    FileNotFoundError, ValueError
        If the folder lacks the file, or the content is not the published one.
    """
    path, num_bytes, sha256 = TRACES[name]
    # One byte more than expected tells a longer file; nothing larger is read or unpacked.
    if folder is None:
        url = f"https://raw.githubusercontent.com/{path}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read(num_bytes + 1)
    elif (folder / name).is_file():
        with open(folder / name, "rb") as file:
            content = file.read(num_bytes + 1)
    elif (folder / f"{name}.gz").is_file():
        try:
            with gzip.open(folder / f"{name}.gz") as file:
                content = file.read(num_bytes + 1)
        except (EOFError, OSError) as error:
            raise ValueError(f"{name}.gz: {error}. Copy the file again.") from error
    else:
        raise FileNotFoundError(f"{folder} has neither {name} nor {name}.gz. Give another --from.")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{name} is not the published file ({sha256[:12]}...). Get it again.")
    return content


def main(arguments=None):
    """Fetch all trace files; files that are not the published ones are never written.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="folder", type=Path, help="take local copies")
    default = Path(__file__).parent / "traces"
    parser.add_argument("--into", type=Path, default=default, help="where to put them")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    for name in TRACES:
        content = read_checked(name, options.folder)
        part = options.into / f"{name}.part"
        part.write_bytes(content)
        part.replace(options.into / name)
        print(f"{options.into / name}: {len(content):,} bytes, sha256 as published")


if __name__ == "__main__":
    main()
