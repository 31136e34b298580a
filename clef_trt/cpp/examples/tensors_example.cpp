// Prints the logits of tensor files, one JSON line each: tensors_example BUNDLE LIBONNXRUNTIME FILE.safetensors…
#include <cstdio>
#include <exception>

#include "clef_tensors.hpp"

int main(int count, char** arguments) {
    if (count < 4) {
        std::fprintf(stderr, "usage: %s BUNDLE LIBONNXRUNTIME FILE.safetensors...\n", arguments[0]);
        return 2;
    }
    try {
        const clef::Session session(arguments[1], arguments[2]);
        for (int i = 3; i < count; ++i) {
            const clef::TensorFile request = clef::read_safetensors(arguments[i]);
            const clef::Logits logits = session.run(request.tensors);
            for (std::int64_t record = 0; record < logits.batch; ++record) {
                std::printf(record == 0 ? "[[" : ", [");
                for (std::int64_t option = 0; option < logits.options; ++option)
                    // Nine digits tell any two numbers of this type apart.
                    std::printf(option == 0 ? "%.9g" : ", %.9g", logits.values[record * logits.options + option]);
                std::printf("]");
            }
            std::printf("]\n");
        }
    } catch (const clef::Error& error) {
        std::fprintf(stderr, "%s: %s\n", clef::name_of(error.kind()), error.what());
        return 1;
    }
    return 0;
}
