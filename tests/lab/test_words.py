from mgpu_tutorial.lab.words import bytes_text


def test_sizes_are_written_as_people_say_them():
    said = [bytes_text(n) for n in (0, 4, 1023, 1024, 1536 * 1024, 2**40)]
    assert said == ["0 B", "4 B", "1023 B", "1 KiB", "1.5 MiB", "1.02e+03 GiB"]
