// Many threads on one host: every answer must be the one that the request gets alone, in flat memory.
// host_load PYTHON BUNDLE REQUESTS.jsonl THREADS COUNT [SETTINGS]; prints one JSON line.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "clef_host.hpp"

namespace {

// Resident memory now.
double megabytes() {
    long pages = 0, resident = 0;
    if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
        std::fclose(file);
    }
    return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

std::vector<std::string> lines_of(const char* path) {
    const clef::Bytes content = clef::read_file(path);
    std::vector<std::string> result;
    std::string_view rest = content.text();
    while (!rest.empty()) {
        const auto end = rest.find('\n');
        if (end != 0) result.emplace_back(rest.substr(0, end));
        rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    }
    return result;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 6) {
        std::fprintf(stderr, "usage: %s PYTHON BUNDLE REQUESTS.jsonl THREADS COUNT [SETTINGS]\n", arguments[0]);
        return 2;
    }
    try {
        const clef::Host host({arguments[2], arguments[1], count > 6 ? arguments[6] : "{}"});
        const auto requests = lines_of(arguments[3]);
        if (requests.empty()) throw clef::Error(clef::Kind::request, "there are no requests");
        const std::size_t threads = std::stoul(arguments[4]), total = std::stoul(arguments[5]);
        std::vector<std::string> alone;
        for (const auto& request : requests) alone.push_back(host.decide(request));

        std::atomic<std::size_t> next{0}, wrong{0};
        std::vector<double> memory(5);  // after each fifth
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> workers;
        for (std::size_t thread = 0; thread < threads; ++thread)
            workers.emplace_back([&] {
                for (std::size_t i = next++; i < total; i = next++) {
                    try {
                        if (host.decide(requests[i % requests.size()]) != alone[i % requests.size()]) ++wrong;
                    } catch (const clef::Error& error) {
                        std::fprintf(stderr, "request %zu: %s\n", i, error.what());
                        ++wrong;
                    }
                    if ((i + 1) * 5 % total < 5 && (i + 1) * 5 / total > 0)
                        memory[(i + 1) * 5 / total - 1] = megabytes();
                }
            });
        for (auto& worker : workers) worker.join();
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        std::printf("{\"requests\": %zu, \"threads\": %zu, \"wrong\": %zu, \"seconds\": %.2f, \"megabytes\": [", total,
                    threads, wrong.load(), spent.count());
        for (std::size_t i = 0; i < memory.size(); ++i) std::printf(i == 0 ? "%.1f" : ", %.1f", memory[i]);
        std::printf("]}\n");
        return wrong == 0 ? 0 : 1;
    } catch (const clef::Error& error) {
        std::fprintf(stderr, "%s: %s\n", clef::name_of(error.kind()), error.what());
        return 1;
    }
}
