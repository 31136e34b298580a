// Driven by test_cpp.py. Each line of standard input is a bundle, settings and a request, separated by tabs; each is
// answered by one line: "=", the response, the logits of its tensors, its probabilities; or "!", kind, message.
// A host is kept while bundle and settings stay the same; then it is destroyed and another one made.
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "clef_host.hpp"

namespace {

void fail(const clef::Error& error, const std::string& more) {
    std::string message = error.what();
    for (char& letter : message)
        if (letter == '\n' || letter == '\t') letter = ' ';
    std::printf("!\t%s\t%s\t%s\n", clef::name_of(error.kind()), message.c_str(), more.c_str());
}

void print(const std::vector<double>& values, const char* format) {
    std::printf("\t[");
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (i != 0) std::printf(", ");
        std::printf(format, values[i]);
    }
    std::printf("]");
}

void answer(const clef::Host& host, const std::string& request) {
    // The longest cases are left to one of the two.
    const std::string response = host.submit(request).get();
    if (request.size() < 10000 && response != host.decide(request))
        throw clef::Error(clef::Kind::host, "submit and decide differ");
    const clef::TensorFile file = host.encode(request);
    const clef::Logits logits = host.run(file.tensors);
    std::vector<double> probabilities;
    for (const auto& question : host.probabilities(request).questions)
        probabilities.insert(probabilities.end(), question.probabilities.begin(), question.probabilities.end());
    std::printf("=\t%s", response.c_str());
    print({logits.values.begin(), logits.values.end()}, "%.9g");
    print(probabilities, "%.17g");
    std::printf("\n");
}

// What a host must refuse, or live through; prints one line per thing seen.
int misuse(const std::string& python, const std::string& bundle) {
    const auto refused = [](const char* what, auto&& call) {
        try {
            call();
        } catch (const clef::Error& error) {
            std::printf("%s\t%s\t%s\n", what, clef::name_of(error.kind()), error.what());
            return;
        }
        std::printf("%s\tnothing\t\n", what);
    };
    refused("no such python", [&] { clef::Host host({bundle, "/nowhere/python"}); });
    {
        clef::Host first({bundle, python, R"({"threads": 1})"}), second({bundle, python, R"({"threads": 1})"});
        refused("another python", [&] { clef::Host host({bundle, python + "3"}); });
        refused("no such bundle", [&] { clef::Host host({"/nowhere", python}); });
        refused("an unknown setting", [&] { clef::Host host({bundle, python, R"({"speed": 2})"}); });
        refused("settings that are no JSON", [&] { clef::Host host({bundle, python, "threads=1"}); });
        refused("a fault of another library", [&] { clef::Host host({bundle, python, R"({"weights": 5})"}); });
        refused("no tensors", [&] { second.run({}); });
        refused("end_python with hosts", [&] { clef::end_python(); });
        auto pending = second.submit("[]");
        std::printf("an empty batch\t%s\n", pending.get().c_str());
        // Left to the destructor, which waits for it.
        auto last = first.submit("{}");
        static_cast<void>(last);
    }
    refused("end_python", [&] { clef::end_python(); });
    refused("a host after end_python", [&] { clef::Host host({bundle, python}); });
    refused("end_python twice", [&] { clef::end_python(); });
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string python = arguments[1];
    if (count > 2) return misuse(python, arguments[2]);
    std::unique_ptr<clef::Host> host;
    std::string opened;
    for (std::string line; std::getline(std::cin, line);) {
        const auto first = line.find('\t'), second = line.find('\t', first + 1);
        try {
            if (line.substr(0, second) != opened) {
                host.reset();
                opened = line.substr(0, second);
                host = std::make_unique<clef::Host>(
                    clef::Settings{line.substr(0, first), python, line.substr(first + 1, second - first - 1)});
            }
            answer(*host, line.substr(second + 1));
        } catch (const clef::TooLongError& error) {
            fail(error, std::to_string(error.needed_tokens) + " " + std::to_string(error.limit_tokens));
        } catch (const clef::RequestError& error) {
            std::string places;
            for (const auto& fault : error.faults) places += fault.place + " ";
            fail(error, places);
        } catch (const clef::Error& error) {
            fail(error, "");
        }
    }
    host.reset();
    clef::end_python();
    return 0;
}
