"""The rows of `make gpu-check`: their list (`rows`), how they run (`running`), and what each of them measures."""
