// Answers the request of a file: host_example PYTHON BUNDLE REQUEST.json
#include <cstdio>

#include "clef_host.hpp"

int main(int count, char** arguments) {
    if (count != 4) {
        std::fprintf(stderr, "usage: %s PYTHON BUNDLE REQUEST.json\n", arguments[0]);
        return 2;
    }
    try {
        const clef::Host host({arguments[2], arguments[1]});
        const clef::Bytes request = clef::read_file(arguments[3]);
        std::printf("%s\n", host.decide(request.text()).c_str());
        for (const auto& question : host.probabilities(request.text()).questions)
            for (std::size_t i = 0; i < question.options.size(); ++i)
                std::fprintf(stderr, "%s  %s  %.4f\n", question.id.c_str(), question.options[i].c_str(),
                             question.probabilities[i]);
    } catch (const clef::Error& error) {
        std::fprintf(stderr, "%s: %s\n", clef::name_of(error.kind()), error.what());
        return 1;
    }
    return 0;
}
