// Driven by embed.py: embed PYTHON BUNDLE SETTINGS REQUEST.json LONG.json REPEATS; prints one JSON object.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clef_host.hpp"

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

namespace {

// The same request by plain Python, on the host's own opened bundle, timed where Python is all there is.
constexpr const char* plain = R"(
import gc, json, time
from clef_trt.embed import Embedded
from clef_trt.strict_json import read_json
(opened,) = [item for item in gc.get_objects() if type(item) is Embedded]
clef = opened._clef
def timed(text):
    start = time.perf_counter_ns()
    json.dumps(clef.decide(read_json(text)), ensure_ascii=False).encode()
    return (time.perf_counter_ns() - start) / 1e6
)";

double milliseconds(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void print(const char* name, const std::vector<double>& values) {
    std::printf("\"%s\": [", name);
    for (std::size_t i = 0; i < values.size(); ++i) std::printf(i == 0 ? "%.5f" : ", %.5f", values[i]);
    std::printf("], ");
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 7) return 2;
    const clef::Host host({arguments[2], arguments[1], arguments[3]});
    const clef::Bytes file = clef::read_file(arguments[4]), long_file = clef::read_file(arguments[5]);
    const std::string request(file.text()), long_request(long_file.text());
    const int repeats = std::stoi(arguments[6]);
    PyObject* timed = clef::detail::in_python([] {
        py::dict names;
        py::exec(plain, names);
        return py::object(names["timed"]).release().ptr();
    });

    const auto timed_call = [](auto&& call) {
        const auto start = Clock::now();
        call();
        return milliseconds(start);
    };
    const std::vector<std::pair<const char*, std::function<double()>>> ways = {
        {"embedded_ms", [&] { return timed_call([&] { host.decide(request); }); }},
        {"python_ms",
         [&] { return clef::detail::in_python([&] { return py::handle(timed)(py::bytes(request)).cast<double>(); }); }},
        {"submitted_ms", [&] { return timed_call([&] { host.submit(request).get(); }); }},
        {"probabilities_ms", [&] { return timed_call([&] { host.probabilities(request); }); }},
    };
    // In turns, so that what the machine does meanwhile meets all of them; back and forth, so that none profits from
    // what came before it.
    std::vector<std::vector<double>> seen(ways.size());
    for (int i = -repeats / 10; i < repeats; ++i)
        for (std::size_t turn = 0; turn < ways.size(); ++turn) {
            const std::size_t way = i % 2 == 0 ? turn : ways.size() - 1 - turn;
            const double spent = ways[way].second();
            if (i >= 0) seen[way].push_back(spent);
        }

    // How many short requests one thread gets answered while another's long pass is inside the engine, and without it.
    host.decide(long_request);
    std::atomic<bool> inside{true};
    int meanwhile = 0;
    std::thread other([&] {
        for (; inside; ++meanwhile) host.decide(request);
    });
    const auto start = Clock::now();
    host.decide(long_request);
    const double long_ms = milliseconds(start);
    inside = false;
    other.join();
    int alone = 0;
    for (const auto begin = Clock::now(); milliseconds(begin) < long_ms; ++alone) host.decide(request);

    std::printf("{");
    for (std::size_t way = 0; way < ways.size(); ++way) print(ways[way].first, seen[way]);
    std::printf("\"long_ms\": %.2f, \"short_meanwhile\": %d, \"short_alone\": %d}\n", long_ms, meanwhile, alone);
    clef::detail::in_python([&] { py::handle(timed).dec_ref(); });
    return 0;
}
